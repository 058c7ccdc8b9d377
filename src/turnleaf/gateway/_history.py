"""Which sampled turn a request continues: the messages of a rollout as a tree."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import attrs
import orjson

from turnleaf.gateway._known import ChildKey, Known, KnownMessages, child_keys, digest_of
from turnleaf.gateway.protocols import Message, bad_request

__all__ = ["ClientReasoning", "Conversation", "History", "Match", "ThinkingRetention"]

ClientReasoning = Literal["restore", "as_sent"]
"""restore: reasoning that the client dropped still matches. as_sent: it does not."""

ThinkingRetention = Literal["template", "tool_cycle", "all"]
"""How long the reasoning of a path stays in it: as long as the chat template shows it; at least
until a user speaks; or as long as the path goes on."""

_MOST_LATEST = 8
"""So many conversations of one rollout that take turns are known again from their latest turns."""


@attrs.frozen(eq=False)
class _Reply:
    """A turn whose reply ends at a node.

    order: counts replies as they were recorded. depth: how many messages there are up to and
    including the reply. carries_reasoning: the path of the turn holds reasoning. before: the
    reply that the turn continued, if any.
    """

    turn_id: str
    order: int
    depth: int
    call_ids: tuple[str, ...]
    carries_reasoning: bool
    before: "_Reply | None"

    def repeated_by(self, conversation: Sequence[Known]) -> int:
        """How many replies on the path have the tool-call ids that the conversation gives them."""
        repeated, at = 0, cast("_Reply | None", self)
        while at is not None:
            repeated += bool(at.call_ids) and conversation[at.depth - 1].call_ids == at.call_ids
            at = at.before
        return repeated


@attrs.define(eq=False)
class _Node:
    """One message after a certain history. Replies with equal content share a node."""

    parent: "_Node | None"
    message: Message
    reasoning: str
    children: dict[ChildKey, list["_Node"]] = attrs.field(factory=dict)
    replies: list[_Reply] = attrs.field(factory=list)


@attrs.frozen(eq=False)
class _Reached:
    """Every node that the first `depth` messages of a conversation may have come to."""

    depth: int
    nodes: list[_Node]


@attrs.frozen(eq=False)
class _Latest:
    """A conversation as of its latest turn, with the reply.

    keys: what the node of each message is found by below its parent. reached: from where on a
    conversation that begins like it is followed; None for the root. recorded: how many turns were
    recorded with it.
    """

    tools: bytes
    known: list[Known]
    keys: list[ChildKey]
    reached: _Reached | None
    recorded: int


@attrs.frozen(eq=False)
class Conversation:
    """A request's messages, and the tools that it offers.

    keys: what the node of each message is found by below its parent. recalled: how many messages,
    from the first on, are those of `latest`, the one of the latest conversations that shares most.
    """

    _tools: bytes
    _tools_size: int
    _known: list[Known]
    _keys: list[ChildKey]
    _recalled: int
    _latest: _Latest | None

    def goes_on_from(self, latest: _Latest) -> bool:
        """Whether it repeats all messages of another, but perhaps its reply."""
        asked = latest.known[:-1]
        return self._known[: len(asked)] == asked

    @property
    def size(self) -> int:
        """Bytes of all messages and tools as JSON."""
        return self._tools_size + sum(known.size for known in self._known)

    @property
    def messages(self) -> list[Message]:
        """The messages in normal form."""
        return [known.message for known in self._known]

    @property
    def raw_messages(self) -> list[Any]:
        """The messages as they were sent: of equal ones, the first."""
        return [known.raw for known in self._known]


@attrs.frozen(eq=False)
class Match:
    """The turn that a request continues.

    recorded: how many turns were recorded by then.
    """

    _new: Sequence[Known]
    _reply: _Reply
    _node: _Node
    _reached: _Reached
    _recorded: int
    _matched: Sequence[Known]
    _retention: ThinkingRetention

    @property
    def turn_id(self) -> str:
        """The turn."""
        return self._reply.turn_id

    @property
    def new(self) -> list[Message]:
        """The messages after its reply."""
        return [known.message for known in self._new]

    @property
    def new_size(self) -> int:
        """Bytes of the messages after its reply, as JSON."""
        return sum(known.size for known in self._new)

    @property
    def carries_reasoning(self) -> bool:
        """Whether the tokens of its path hold reasoning, sampled or rendered."""
        return self._reply.carries_reasoning

    @property
    def may_lose_reasoning(self) -> bool:
        """Whether its path holds reasoning that goes if the chat template now omits it."""
        if not self.carries_reasoning or self._retention == "all":
            return False
        return self._retention == "template" or _asks(self._new)

    @property
    def asked(self) -> bool:
        """Whether a user has spoken up to the reply."""
        return _asks(self._matched)

    @property
    def reply(self) -> Message:
        """The turn's reply."""
        return _with_ids_of(self._matched[-1].message, self._node.message)

    def past(self) -> list[Message]:
        """The messages up to and including the reply, with reasoning that the client dropped."""
        seen = _messages_to(self._node)
        return [
            _with_ids_of(known.message, message)
            for known, message in zip(self._matched, seen, strict=True)
        ]


class History:
    """Every conversation that one rollout has had with the model.

    A message is normalised and canonicalised until a turn with it is recorded; after that its raw
    bytes are enough to know it again. Nothing is kept of a request that led to no turn.
    """

    def __init__(
        self,
        client_reasoning: ClientReasoning = "restore",
        thinking_retention: ThinkingRetention = "template",
    ) -> None:
        self._restore = client_reasoning == "restore"
        self._retention = thinking_retention
        self._known = KnownMessages()
        self._latest: tuple[_Latest, ...] = ()
        self._roots: dict[bytes, _Node] = {}
        self._recorded = 0
        self._is_ambiguous = False

    def read(self, raw_messages: Sequence[Any], tools: Any) -> Conversation:
        """Take in a request's messages; raises RequestError that names the field at fault.

        Changes nothing, and may run in a thread while turns are recorded.
        """
        latest, recalled = self._recall(raw_messages)
        known = latest.known[:recalled] if latest else []
        try:
            known += [
                self._known.know(raw_messages[at], f"messages[{at}]")
                for at in range(recalled, len(raw_messages))
            ]
            raw_tools = orjson.dumps(tools)
        except (orjson.JSONEncodeError, RecursionError):
            raise bad_request("messages", "they, or the tools, are nested too deeply") from None
        keys = (latest.keys[:recalled] if latest else []) + child_keys(known, recalled)
        return Conversation(digest_of(raw_tools), len(raw_tools), known, keys, recalled, latest)

    def _recall(self, raw_messages: Sequence[Any]) -> tuple[_Latest | None, int]:
        """Which conversation has the most of these first messages just so, and how many."""
        best, recalled = None, list[Known]()
        for latest in self._latest:
            at = 0
            # Those that begin alike share what they begin with, which is compared once.
            for known, one in zip(latest.known, recalled, strict=False):
                if known is not one:
                    break
                at += 1
            for known, raw in zip(latest.known[at:], raw_messages[at:], strict=False):
                if not known.is_repeated_by(raw):
                    break
                at += 1
            if at > len(recalled):
                best, recalled = latest, latest.known[:at]
        return best, len(recalled)

    def match(self, conversation: Conversation, delivered: Callable[[str], bool]) -> Match | None:
        """The latest turn whose messages and reply the conversation begins with, if any.

        delivered: whether the reply of the turn with an id was delivered. Among equals, the one
        wins on whose path the client repeats the most tool-call ids, then one that was delivered,
        then the latest.
        """
        reached = self._start(conversation)
        depth, frontier = reached.depth, reached.nodes
        following = zip(conversation._known[depth:], conversation._keys[depth:], strict=True)
        for known, key in following:
            frontier = [
                child
                for node in frontier
                for child in node.children.get(key, ())
                if child.reasoning == known.reasoning or (self._restore and not known.reasoning)
            ]
            if not frontier:
                break
            depth += 1
            if any(node.replies for node in frontier):
                reached = _Reached(depth, frontier)
        candidates = [(node, reply) for node in reached.nodes for reply in node.replies]
        if not candidates:
            return None
        matched, new = conversation._known[: reached.depth], conversation._known[reached.depth :]
        if len(candidates) > 1:
            candidates.sort(
                key=lambda candidate: (
                    candidate[1].repeated_by(matched),
                    delivered(candidate[1].turn_id),
                    candidate[1].order,
                )
            )
        node, reply = candidates[-1]
        return Match(new, reply, node, reached, self._recorded, matched, self._retention)

    def _start(self, conversation: Conversation) -> _Reached:
        """From where on a conversation is to be followed."""
        latest = conversation._latest
        if latest and latest.tools == conversation._tools and self._still_complete(latest.recorded):
            reached = latest.reached
            if reached is not None and reached.depth <= conversation._recalled:
                return reached
        root = self._roots.get(conversation._tools)
        return _Reached(0, [root] if root else [])

    def _still_complete(self, recorded: int) -> bool:
        """Whether messages lead to no more nodes than when so many turns were recorded."""
        return recorded == self._recorded or not self._is_ambiguous

    def record(
        self,
        conversation: Conversation,
        match: Match | None,
        reply: dict[str, Any],
        turn_id: str,
        *,
        shows_reasoning: bool,
    ) -> bool:
        """Remember the reply that a turn gave to a conversation; returns whether it had one before.

        match: what the conversation continued, if anything. shows_reasoning: the turn's prompt
        holds reasoning, or its reply something that is reasoning to the template.
        """
        if match is None:
            node, start = self._roots.setdefault(conversation._tools, _Node(None, {}, "")), 0
        else:
            node, start = match._node, len(match._matched)
        for at in range(start, len(conversation._known)):
            node = self._child(node, conversation._known[at], conversation._keys[at])
        known = self._known.know(reply, "reply")
        reached = match._reached if match and self._still_complete(match._recorded) else None
        repeated = any(child.replies for same in node.children.values() for child in same)
        node = self._child(node, known, known.key)
        node.replies.append(
            _Reply(
                turn_id=turn_id,
                order=self._recorded,
                depth=len(conversation._known) + 1,
                call_ids=known.call_ids,
                carries_reasoning=shows_reasoning or bool(known.reasoning),
                before=match._reply if match else None,
            )
        )
        self._recorded += 1
        self._remember(conversation, known, reached)
        return repeated

    def _child(self, node: _Node, known: Known, key: ChildKey) -> _Node:
        variants = node.children.setdefault(key, [])
        for variant in variants:
            if variant.reasoning == known.reasoning:
                return variant
        child = _Node(node, known.message, known.reasoning)
        # As long as there is one variant of each message, the same ones lead to the same node.
        self._is_ambiguous |= bool(variants)
        variants.append(child)
        return child

    def _remember(self, conversation: Conversation, reply: Known, reached: _Reached | None) -> None:
        """reached: by what the turn continued; its own nodes are below those."""
        # The messages of the turn that it continues too: a client has a spelling of its own for
        # what it was sent.
        for one in (*conversation._known[conversation._recalled :], reply):
            self._known.remember(one)
        latest = _Latest(
            tools=conversation._tools,
            known=[*conversation._known, reply],
            keys=[*conversation._keys, reply.key],
            reached=reached,
            recorded=self._recorded,
        )
        others = [other for other in self._latest if not conversation.goes_on_from(other)]
        self._latest = (*others, latest)[-_MOST_LATEST:]


def _asks(messages: Sequence[Known]) -> bool:
    return any(known.message["role"] == "user" for known in messages)


def _messages_to(node: _Node) -> list[Message]:
    messages = []
    at: _Node | None = node
    while at is not None and at.parent is not None:
        messages.append(at.message)
        at = at.parent
    return messages[::-1]


def _with_ids_of(client: Message, seen: Message) -> Message:
    """The message as it was first seen, calling its tool calls what this client calls them."""
    if "tool_call_id" in client:
        return {**seen, "tool_call_id": client["tool_call_id"]}
    if "tool_calls" in client:
        calls = zip(client["tool_calls"], seen["tool_calls"], strict=True)
        return {**seen, "tool_calls": [{**call, "id": mine["id"]} for mine, call in calls]}
    return seen
