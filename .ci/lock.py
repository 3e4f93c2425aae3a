"""Pins in constraints.txt what is installed here: the versions above the mark, and below it all that they need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

FILE = Path(__file__).parent.parent / "constraints.txt"
MARK = "# what these need in turn (written by `make lock`)\n"


def main() -> None:
    """Rewrite the file."""
    above = FILE.read_text().partition(MARK)[0].rstrip() + "\n"
    pinned = re.sub(r"^([\w.-]+)==.*$", lambda found: f"{found[1]}=={version_of(found[1])}", above, flags=re.MULTILINE)
    direct = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pinned, flags=re.MULTILINE)}
    others = sorted(set(needed_by("cadenza", {"dev"}, set())) - direct - {"cadenza"})
    FILE.write_text(pinned + f"\n{MARK}" + "".join(f"{name}=={version_of(name)}\n" for name in others))


def version_of(name: str) -> str:
    """The installed version, without the build's mark, such as torch's +cpu."""
    return Version(distribution(name).version).public


def needed_by(name: str, extras: set[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """What a package needs here, with these of its extras, and what that needs in turn."""
    try:
        required = distribution(name).requires or []
    except PackageNotFoundError:  # of another system
        return
    yield canonicalize_name(name)
    for text in required:
        requirement = Requirement(text)
        for extra in ["", *extras]:
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            key = (canonicalize_name(requirement.name), ",".join(sorted(requirement.extras)))
            if key not in seen:
                seen.add(key)
                yield from needed_by(requirement.name, set(requirement.extras), seen)


if __name__ == "__main__":
    main()
