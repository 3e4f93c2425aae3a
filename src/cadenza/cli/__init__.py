"""The command line: `cadenza train`, `report`, `bench`, `doctor`."""
