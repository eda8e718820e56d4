"""Language models as operators, and the model catalogue."""

if __name__ != "perfmodel.models":
    raise ImportError(f"import this package as perfmodel.models, not as {__name__}")
