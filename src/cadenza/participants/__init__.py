"""Who is there: workers that are always the same, or workers that come and go, and how they agree."""
