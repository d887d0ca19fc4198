"""Errors that a person can mend: the message says what happened and what to do."""

import errno

STORAGE = {  # of the system's own errors, those that whoever owns the disk can mend
    errno.ENOSPC: "make room there, and run the same command again",
    errno.EDQUOT: "make room there, and run the same command again",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose another folder, or change its permissions",
}


class UserError(Exception):
    """The command line prints its message alone, without a stack trace."""


def one_line(error: BaseException) -> str:
    """What another library raised, short enough to stand within a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def storage_trouble(error: OSError) -> str:
    """The sentence for a disk that is full or closed; nothing for all other errors."""
    advice = STORAGE.get(error.errno or 0)
    where = error.filename or "the disk"
    return f"{where} cannot be used ({error.strerror}): {advice}" if advice else ""


def missing_extra(package: str, extra: str) -> UserError:
    """An optional dependency is not installed: the line to run."""
    return UserError(
        f"{package} is not installed; in your clone of Stillhouse run: pip install -e '.[{extra}]'"
    )
