"""What the documentation is made with: pages from the library itself, the site's theme, and figures from files."""
