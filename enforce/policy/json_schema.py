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

from agent.config.sections import Section, example, is_list, scalar, show
from enforce.policy.schema import PolicySection

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
            shown = made["properties"][key]
            if info.default not in (PydanticUndefined, None, []):
                shown["default"] = info.default if is_list(info) else scalar(show(info, info.default))
            if shown.get("type") not in (None, "array", "object", "boolean") or "pattern" in str(shown.get("anyOf")):
                shown["examples"] = [scalar(example(info))]
        return made


def document() -> dict[str, Any]:
    """The whole schema."""
    made = PolicySection.model_json_schema(by_alias=False, schema_generator=_Generator)
    return {"$schema": DIALECT, **made, "title": "GPU Warden policy"}


def page() -> str:
    """As text, and as docs/policy.schema.json."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(page(), end="")
