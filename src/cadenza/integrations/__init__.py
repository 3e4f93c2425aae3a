"""Other frameworks: one module for each, and the only place that imports them."""
