"""Prints the folder for PYTHONPATH."""

from tandem_ep.compat import path

if __name__ == "__main__":
    print(path())
