"""Turns as versioned JSON: the same bytes on the control API and in files."""

import base64
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cattrs
import numpy as np
import numpy.typing as npt

from turnleaf.core._described import described
from turnleaf.core._errors import TrajectoryError
from turnleaf.core._turn import Logprobs, ReplayArray, TokenIds, Turn

__all__ = ["VERSION", "turns_from_json", "turns_to_json"]

VERSION = 1


def _encode(array: npt.NDArray[Any]) -> str:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return base64.b64encode(little.tobytes()).decode("ascii")


def _decoder(dtype: str) -> Callable[[Any, Any], npt.NDArray[Any]]:
    def decode(text: Any, _: Any) -> npt.NDArray[Any]:
        return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)

    return decode


def _encode_replay(array: npt.NDArray[Any]) -> dict[str, Any]:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": _encode(array)}


def _decode_replay(value: Any, _: Any) -> npt.NDArray[Any]:
    if value["dtype"] not in ("uint8", "uint16", "uint32", "uint64"):
        raise ValueError(f"replay data of dtype {value['dtype']!r}")
    dtype = np.dtype(value["dtype"]).newbyteorder("<").str
    return _decoder(dtype)(value["data"], None).reshape(value["shape"])


def _exactly(*kinds: type[Any]) -> Callable[[Any, Any], Any]:
    def structure(value: Any, _: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(f"expected {kinds[0].__name__}, not {type(value).__name__}")
        return kinds[0](value)

    return structure


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    # Left to itself, cattrs would read the id null as "None" and the index 3.7 as 3.
    converter.register_structure_hook(str, _exactly(str))
    converter.register_structure_hook(int, _exactly(int))
    converter.register_structure_hook(float, _exactly(float, int))
    for kind, encode, decode in (
        (TokenIds, _encode, _decoder("<i4")),
        (Logprobs, _encode, _decoder("<f4")),
        (ReplayArray, _encode_replay, _decode_replay),
    ):

        def is_kind(annotation: Any, kind: Any = kind) -> bool:
            return bool(annotation == kind)

        converter.register_unstructure_hook_func(is_kind, encode)
        converter.register_structure_hook_func(is_kind, decode)
    return converter


_converter = _make_converter()


def turns_to_json(turns: Iterable[Turn], refused: Mapping[str, int]) -> bytes:
    """The turns in the given order, which must name parents before their children.

    refused: see `Trajectory`.
    """
    document = {"version": VERSION, "turns": [_converter.unstructure(turn) for turn in turns]}
    if refused:
        document["refused"] = dict(refused)
    return json.dumps(document, separators=(",", ":")).encode()


def turns_from_json(data: bytes | str) -> tuple[list[Turn], dict[str, int]]:
    """Read what `turns_to_json` wrote; raises TrajectoryError when it is anything else."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"a serialised trajectory is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise TrajectoryError(
            f"a serialised trajectory is a JSON object, not {type(document).__name__}"
        )
    version = document.get("version")
    # To Python, true and 1.0 are equal to 1.
    if type(version) is not int or version != VERSION:
        raise TrajectoryError(
            f"a serialised trajectory of version {reprlib.repr(version)}; "
            f"this turnleaf reads version {VERSION}"
        )
    unknown = document.keys() - {"version", "turns", "refused"}
    if unknown:
        raise TrajectoryError(
            f"a serialised trajectory with the unknown key {reprlib.repr(min(unknown))}"
        )
    turns = document.get("turns")
    if not isinstance(turns, list):
        raise TrajectoryError("a serialised trajectory has no list of turns")
    refused = _refused_from(document.get("refused", {}))
    return [_turn_from(value, position) for position, value in enumerate(turns)], refused


def _refused_from(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or not all(
        type(count) is int and count > 0 for count in value.values()
    ):
        raise TrajectoryError(
            "`refused` of a serialised trajectory is not an object of error codes with how many "
            "requests each refused"
        )
    return value


def _turn_from(value: Any, position: int) -> Turn:
    where = f"turn {position} of a serialised trajectory is not valid"
    if not isinstance(value, dict):
        raise TrajectoryError(f"{where}: expected an object, not {type(value).__name__}")
    try:
        return _converter.structure(value, Turn)
    except cattrs.BaseValidationError as error:
        problems = cattrs.transform_error(error, path="turn", format_exception=_problem)
        raise TrajectoryError(f"{where}: {'; '.join(problems)}") from None


def _problem(error: BaseException, _: type | None) -> str:
    return str(error) if isinstance(error, TrajectoryError) else described(error)
