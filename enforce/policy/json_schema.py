# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden policy schema`: JSON Schema for editors, from the same sections that a policy is checked by.

It completes and explains keys and marks most slips while they are typed; what it cannot say (ranges of durations,
rules that collide) `gpuwarden check` says. Draft 7: what the YAML language server reads in every editor.
"""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import PydanticUndefined, core_schema

from enforce.policy.kind import scalar
from enforce.policy.schema import PolicySection, Section
from enforce.policy.sections import kind_of

DIALECT = "http://json-schema.org/draft-07/schema#"


class _Generator(GenerateJsonSchema):
    """Keys are there or not, never null; defaults are shown as people write them."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        made.pop("title")
        section = cast(type[Section], schema["cls"])
        for key, info in section.model_fields.items():
            if info.default not in (PydanticUndefined, None, []):
                made["properties"][key]["default"] = _written(info.default, kind_of(info))
        return made


def _written(default: Any, kind: Any) -> Any:
    """A default in base units as it would stand in the file."""
    return default if isinstance(default, list) or kind is None else scalar(kind.show(default))


def document() -> dict[str, Any]:
    """The whole schema."""
    made = PolicySection.model_json_schema(by_alias=False, schema_generator=_Generator)
    return {"$schema": DIALECT, **made, "title": "GPU Warden policy"}


def page() -> str:
    """As text, and as docs/policy.schema.json."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(page(), end="")
