"""The names of BlendHub that plugins may import: those of ``__all__``, or what a module without it defines."""

from importlib import import_module

PUBLIC = (
    "blendhub",
    "blendhub.contracts",
    "blendhub.core",
    "blendhub.core.errors",
    "blendhub.devices",
    "blendhub.devices.batches",
    "blendhub.framework.hookspecs",
    "blendhub.framework.options",
    "blendhub.system",
    "blendhub.testing",
)


def names_in(module: str) -> list[str]:
    found = vars(import_module(module))
    return found.get("__all__") or [name for name, one in found.items() if getattr(one, "__module__", "") == module]


def is_public(module: str, name: str) -> bool:
    """Whether a name is public in a module, or in a public package that the module is in."""
    packages = (public for public in PUBLIC if f"{module}.".startswith(f"{public}."))
    return f"{module}.{name}" in PUBLIC or name == "__version__" or any(name in names_in(each) for each in packages)
