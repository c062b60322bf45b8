"""The pure core: no I/O, no clock, no plug-ins. Imports the standard library, msgspec and errors only."""
