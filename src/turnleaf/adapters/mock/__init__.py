"""What offline tests and the demo need: a scripted engine with a ledger, and the books' check."""

from turnleaf.adapters.mock._balance import LedgerReport, Loss, compare
from turnleaf.adapters.mock._calls import Call, MockEngine
from turnleaf.adapters.mock._checkpoint import cached_checkpoint, write_checkpoint
from turnleaf.adapters.mock._engine_app import engine_app, serve_engine
from turnleaf.adapters.mock._ledger import Ledger, LedgerEntry
from turnleaf.adapters.mock._script import Reply, ReplyFunction, Script
from turnleaf.adapters.mock._scripted import ScriptedEngine, Tokenizer
from turnleaf.adapters.mock._tokenizer import FileTokenizer

__all__ = [
    "Call",
    "FileTokenizer",
    "Ledger",
    "LedgerEntry",
    "LedgerReport",
    "Loss",
    "MockEngine",
    "Reply",
    "ReplyFunction",
    "Script",
    "ScriptedEngine",
    "Tokenizer",
    "cached_checkpoint",
    "compare",
    "engine_app",
    "serve_engine",
    "write_checkpoint",
]
