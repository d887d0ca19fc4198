"""Importing the package stays light."""

import subprocess
import sys


def test_heavy_packages_are_imported_where_they_are_used():
    heavy = "datasets", "torchdata", "PIL", "pyarrow", "s3fs"
    script = f"import sys, stillhouse.data; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
