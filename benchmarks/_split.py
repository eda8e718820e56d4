"""The steps of `perfmodel frontier`, in its order, each with a clock: `MODEL CHIP,CHIP… OUT`."""

import json
import sys
from pathlib import Path

from benchmarks._measure import COMPILE, LOWER, TRACE, Clock, Spent, compilations, covered


def main(model: str, chips: str, out: Path) -> None:
    """Writes what each step takes to `split.json`."""
    clock = Clock()

    def lap() -> Spent:
        nonlocal clock
        passed, clock = clock.spent(), Clock()
        return passed

    from perfmodel import report

    with report.Drawing() as drawing:
        import perfmodel

        perfmodel.enable_cache()
        search = perfmodel.frontier
        imports = lap()
        with compilations() as seen:
            found = search(model, chips.split(","), isl=4000, osl=1000, max_chips=16)
        searched = lap()
        report.save_frontier(found, out, drawing=drawing)
        files = lap()
    report.write(report.frontier_table(found))
    table = lap()
    built = covered([span for spans in seen.values() for span in spans])
    # Wall time, and CPU time of this process where a step has its own.
    steps = {
        "imports": imports[:2],
        "the search, in all": searched[:2],
        "trace and lower": (covered(seen[TRACE] + seen[LOWER]), None),
        "compile, or read from the cache": (covered(seen[COMPILE]), None),
        "evaluate and select": (searched.wall - built, None),
        "files and plots": files[:2],
        "table": table[:2],
    }
    written = {"steps": steps, "evaluated": int(found.attrs["evaluated"])}
    (out / "split.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
