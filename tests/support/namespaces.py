"""Programs in other namespaces of the kernel, as containers have them."""

import subprocess

import pytest


def unshared(*options):
    """The command that runs another one in namespaces of its own; skips where the system allows nobody to make them."""
    for who in ([], ["--user", "--map-root-user"]):
        command = ["unshare", *who, *options, "--fork", "--kill-child"]
        if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
            return command
    pytest.skip(f"this system lets nobody run `{' '.join(command)}`")
