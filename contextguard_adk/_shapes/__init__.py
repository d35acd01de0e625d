"""The forms in which providers accept a request's contents; one file each."""

from __future__ import annotations

from contextguard_adk._shapes.media_limit import limit_media
from contextguard_adk._shapes.one_text import join_texts
from contextguard_adk._shapes.recalled_files import attach_recalled_files
from contextguard_adk._shapes.refused_forms import fit_refused_form
from contextguard_adk._shapes.repair import repair
from contextguard_adk._shapes.sealed_thoughts import leave_out_thoughts
from contextguard_adk._turn.units import Shape

SHAPES: tuple[Shape, ...] = (
    repair,
    attach_recalled_files,
    limit_media,
    fit_refused_form,
    join_texts,
    leave_out_thoughts,
)
"""In the order in which they are applied."""
