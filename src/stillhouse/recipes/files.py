"""Files that appear whole or not at all."""

from stillhouse.files import write_whole

__all__ = ["write_whole"]
