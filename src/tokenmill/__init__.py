"""tokenmill turns a prompt set and a model into a checked training dataset, on every GPU it is given."""

__version__ = "0.1.0"
