"""`python -m flatbed`."""

from flatbed_command import main

if __name__ == "__main__":
    main()
