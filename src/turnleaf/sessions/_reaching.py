"""Why a connection failed, in words, whatever library says it."""

import os
import socket
import ssl

__all__ = ["chain", "is_nameless", "reason"]


def reason(error: BaseException) -> str:
    """What the system, else TLS, else the exception itself says."""
    errors = chain(error)
    # Before the system's errors: TLS numbers its own from 1, too.
    tls = [one for one in errors if isinstance(one, ssl.SSLError)]
    for failure in tls:
        said = getattr(failure, "verify_message", None) or getattr(failure, "reason", None)
        if said:
            return f"TLS failed: {said.replace('_', ' ').lower()}"
    if tls:
        return f"TLS failed: {tls[0]}"
    for one in errors:
        if isinstance(one, socket.gaierror):
            return "the name is not known"
        if isinstance(one, OSError) and one.errno is not None:
            return os.strerror(one.errno).lower()
    return str(error) or type(error).__name__


def is_nameless(error: BaseException) -> bool:
    """Whether a host's name is not known, or can be no host's."""
    return any(isinstance(one, socket.gaierror | UnicodeError) for one in chain(error))


def chain(error: BaseException) -> list[BaseException]:
    """An exception and those that it came of."""
    chain = [error]
    for one in chain:
        also = [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]
        chain += [other for other in also if other is not None and other not in chain]
    return chain
