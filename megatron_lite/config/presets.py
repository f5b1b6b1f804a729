"""Models by name: published sizes and kinds, as values of `ModelConfig` fields. presets.yaml has them, with sources."""

from pathlib import Path
from typing import Any

import yaml

# libyaml's parser, which reads the file in a few milliseconds, is not in every build of PyYAML.
_FAMILIES = yaml.load(
    Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8"),
    Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
PRESETS: dict[str, dict[str, Any]] = {
    name: family["fields"] | fields for family in _FAMILIES.values() for name, fields in family["models"].items()
}
