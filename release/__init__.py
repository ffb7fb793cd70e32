"""What a release consists of, built, and tried as its users would install it: `make release-check`.

Knows the files in dist/ and how they are installed; of the package only its version and its kernels' machines.
"""
