"""The live demo: block tables, pool and token tree of a running search."""
