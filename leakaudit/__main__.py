"""`python -m leakaudit`."""

from leakaudit.cli import main

if __name__ == "__main__":
    main()
