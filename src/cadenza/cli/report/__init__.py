"""`cadenza report`: one self-contained HTML page of a run, or of several beside each other."""
