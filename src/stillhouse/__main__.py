"""`python -m stillhouse`, which is also how torchrun starts it."""

from stillhouse.cli import main

if __name__ == "__main__":
    main()
