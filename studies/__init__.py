"""Studies: each answers one question, and runs as `perfmodel study NAME`."""

if __name__ != "perfmodel.studies":
    raise ImportError(f"import this package as perfmodel.studies, not as {__name__}")
