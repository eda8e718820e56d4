"""A second process that draws a frontier while the first one does something else.

Importing matplotlib and xarray takes longer than drawing. Started early, the second process has
them ready by the time there is something to draw, on a core of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any


class Drawing:
    """A process that waits for one request to draw; use as a context.

    Without it (no second process can be started, or it fails) `draw` returns False, and the caller
    draws itself.
    """

    def __init__(self) -> None:
        # The same modules as here, wherever they come from.
        code = f"import sys; sys.path[:] = {sys.path!r}; import perfmodel.report as r; r.serve()"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self._process = None

    def __enter__(self) -> "Drawing":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def start(self, request: Mapping[str, Any]) -> None:
        """Sends what to draw: the arguments of `report.draw_files`."""
        if self._process is not None and self._process.stdin is not None:
            try:
                self._process.stdin.write(json.dumps(request, default=os.fspath).encode())
                self._process.stdin.close()
            except OSError:
                self.__exit__()
            else:
                self._process.stdin = None

    def finished(self) -> bool:
        """Waits, and returns whether everything was drawn."""
        return self._process is not None and self._process.wait() == 0
