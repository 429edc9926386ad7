"""python -m tbik = tbik."""

from tbik.cli import main

if __name__ == "__main__":
    main()
