"""`python -m leakaudit`."""

from leakaudit.storage.parent_watch import watch_parent

if __name__ == "__main__":
    watch_parent()  # a side process ends with its trainer even while it still loads the rest
    from leakaudit.cli import main

    main()
