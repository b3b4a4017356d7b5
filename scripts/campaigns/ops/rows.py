"""Rows of a table that a script prints and adds to a file, where one is named."""


def known(path):
    """The text of the file; "": there is none."""
    return path.read_text() if path and path.exists() else ""


def add(path, *rows):
    print("\n".join(rows), flush=True)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            print("\n".join(rows), file=file)
