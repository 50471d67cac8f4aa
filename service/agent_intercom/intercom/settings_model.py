# SPDX-License-Identifier: Apache-2.0
"""The settings for what people call (`intercom config check|show`): the schema of `settings`, in pydantic-settings.

Never imported by a broker: pydantic costs several hundred milliseconds. Names, types, bounds and defaults come from
`settings.schema`, so there is one place to change; tests hold the two readers to the same verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from agent_intercom.intercom import paths, settings
from agent_intercom.intercom.settings import Problem

_CODES = {
    "int_type": "WRONG_TYPE",
    "greater_than_equal": "OUT_OF_RANGE",
    "less_than_equal": "OUT_OF_RANGE",
}


class Shown(NamedTuple):
    """One setting as the broker would use it. `source` is `default`, `file` or the name of a variable."""

    key: str
    value: int
    source: str
    default: int
    low: int
    high: int
    text: str


class _Base(BaseSettings):
    """Unknown keys are refused, and a number is a number: no text, no truth value, no fraction."""

    model_config = SettingsConfigDict(
        env_prefix=settings.PREFIX, env_ignore_empty=True, case_sensitive=True, extra="forbid", frozen=True, strict=True
    )


def _fields() -> dict[str, Any]:
    return {
        key: (int, Field(bounds.default, ge=bounds.low, le=bounds.high, strict=True, description=bounds.text))
        for key, bounds in settings.schema().items()
    }


IntercomSettings: type[BaseSettings] = create_model("IntercomSettings", __base__=_Base, **_fields())
"""Every setting, validated as a whole."""


def read(environ: Mapping[str, str]) -> BaseSettings:
    """The settings of `environ` and its configuration file.

    Raises pydantic's ValidationError, or SettingError where the file cannot be read at all.
    """
    file = paths.config_file(environ)
    entries = {} if file is None else settings.read_file(file)

    class Here(IntercomSettings):  # type: ignore[misc, valid-type]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, _Environment(settings_cls, environ), InitSettingsSource(settings_cls, entries)

    return Here()


def check(environ: Mapping[str, str]) -> list[Problem]:
    """What is wrong with the settings of `environ` and its configuration file."""
    try:
        read(environ)
    except settings.SettingError as error:
        return [Problem(settings.FILE_KEY, error.code, str(error))]
    except ValidationError as error:
        variables = {key: variable for key, variable, _ in settings.from_environment(environ)}
        return [_problem(entry["type"], str(entry["loc"][0]), entry["msg"], variables) for entry in error.errors()]
    return []


def show(environ: Mapping[str, str]) -> list[Shown]:
    """Every setting as the broker would use it, whatever is wrong with some."""
    loaded = settings.load(environ)
    return [
        Shown(
            key,
            getattr(loaded.settings, key),
            loaded.sources.get(key, "default"),
            bounds.default,
            bounds.low,
            bounds.high,
            bounds.text,
        )
        for key, bounds in settings.schema().items()
    ]


def _problem(kind: str, key: str, text: str, variables: Mapping[str, str]) -> Problem:
    if kind == "extra_forbidden":
        return settings.unknown(key, settings.schema())
    source = variables.get(key, settings.FILE_KEY)
    return Problem(key, _CODES[kind], f"{key if source == settings.FILE_KEY else source}: {text}", source)


class _Environment(EnvSettingsSource):
    """The variables that the broker reads, from a mapping, as numbers where they are decimal digits."""

    def __init__(self, settings_cls: type[BaseSettings], environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(settings_cls)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {self.env_prefix + key: value for key, _, value in settings.from_environment(self._environ)}

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        return settings.whole(value) if isinstance(value, str) else value
