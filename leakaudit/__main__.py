"""`python -m leakaudit`."""

from leakaudit.storage.parent_watch import leash

if __name__ == "__main__":
    leash()  # a side process goes with its trainer even while it is still loading the rest
    from leakaudit.cli import main

    main()
