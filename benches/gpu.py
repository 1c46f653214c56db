"""Checks and measures the CUDA device of this machine, beside PyTorch: the package `gpu`."""

import sys

# A machine that is lent for minutes keeps no compiled Python.
sys.dont_write_bytecode = True

# Beside this file lies the package of the same name, and Python takes packages first.
from gpu.main import main

if __name__ == "__main__":
    main()
