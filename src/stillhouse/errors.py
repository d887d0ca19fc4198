"""Errors that a person can mend: the message says what happened and what to do."""


class UserError(Exception):
    """The command line prints its message alone, without a stack trace."""


def one_line(error: BaseException) -> str:
    """What another library raised, short enough to stand within a sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def missing_extra(package: str, extra: str) -> UserError:
    """An optional dependency is not installed: the line to run."""
    return UserError(f"{package} is not installed; run: pip install 'stillhouse[{extra}]'")
