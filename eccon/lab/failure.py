"""Ways in which making a lab fails."""

__all__ = ["CheckError", "RegistryError", "SetupError"]


class SetupError(Exception):
    """The lab could not be made; the message says why and what to do."""


class CheckError(SetupError):
    """This machine cannot hold one: found before anything was done."""


class RegistryError(SetupError):
    """The package registries at hand do not serve what it is made of."""
