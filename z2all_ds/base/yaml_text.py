"""Reads YAML that people write: run configs, overrides, hostfiles, probes. Any text gives a value or a BadYaml.

Stricter than PyYAML: repeated keys, of which it takes the last, are refused, and so are aliases and deep nesting, by
which a small file can grow without end. A date is text.
"""

from typing import Any

import yaml

MAX_DEPTH = 50
LEAKED = (ValueError, OverflowError, AttributeError, LookupError, TypeError)
"""Errors that PyYAML passes on, for huge numbers, bytes that are not UTF-8, or explicit tags such as !!timestamp."""


class BadYaml(ValueError):
    """The text is not YAML, or not the part of it that is supported."""

    def __init__(self, problem: str, line: int | None) -> None:
        super().__init__(problem + (f" in line {line}" if line else ""))
        self.problem, self.line = problem, line


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - the name and form that PyYAML reads
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        if self.check_event(yaml.AliasEvent):
            raise yaml.composer.ComposerError(problem="aliases are not supported", problem_mark=event.start_mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            problem = f"nested more than {MAX_DEPTH} deep"
            raise yaml.composer.ComposerError(problem=problem, problem_mark=event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key must be a plain value"
            elif key.value in lines:
                problem = f"{key.value} is already given in line {lines[key.value]}"
            else:
                lines[key.value] = key.start_mark.line + 1
                continue
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


def load_yaml(text: str | bytes) -> Any:
    """Return the value of one YAML document."""
    return load_yaml_tree(text)[0]


def load_yaml_tree(text: str | bytes) -> tuple[Any, yaml.Node | None]:
    """Return the value, and the tree of nodes with their lines."""
    try:
        loader = _Loader(text)
        tree = loader.get_single_node()
        return (loader.construct_document(tree) if tree else None), tree
    except (yaml.YAMLError, *LEAKED) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise BadYaml(problem, mark.line + 1 if mark else None) from None
