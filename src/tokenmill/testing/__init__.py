"""Ships with the package, since authors of plug-ins need it, too: a scripted server that speaks all dialects."""
