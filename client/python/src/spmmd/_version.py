"""The one place that names the version; kept equal to the server's (CMakeLists.txt)."""

__version__ = "0.1.0"
