"""`python -m cortexmlx`: the command line, where the `cortexmlx` script is not on the path."""

from cortexmlx.cli import main

if __name__ == "__main__":
    main()
