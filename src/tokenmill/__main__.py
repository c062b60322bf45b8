"""python -m tokenmill: the same as the command tokenmill."""

from tokenmill.cli import main

if __name__ == "__main__":
    main()
