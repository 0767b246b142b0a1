"""Errors that are meant for people.

Every error says what is wrong, where (node, field or file), and what to do about it. The command line prints
the message alone and exits with code 2; a traceback would mean a fault of ortc itself.
"""

from __future__ import annotations


class OrtcError(Exception):
    """A mistake in what the user handed in: model, recipe, data, folder or checkpoint."""


class ModelError(OrtcError):
    """The model file cannot be read, or holds something that cannot be trained."""


class RecipeError(OrtcError):
    """A field of the recipe (or a flag) is wrong."""


class PlanError(OrtcError):
    """The output folder or its ``plan.json`` is damaged, incomplete or of another version."""


class DataError(OrtcError):
    """The data does not fit the model's inputs or the loss's targets."""


class CheckpointError(OrtcError):
    """A checkpoint is damaged, missing, or belongs to another model."""


class NotFiniteError(OrtcError):
    """The loss or a gradient is NaN or infinite.

    Attributes:
        report: what was found, as JSON data: the step, the loss, the first node that made such a value where one process ran
            the whole model, and how large the elements of each gradient are.
    """

    report: dict | None = None
