"""A short temper in place of long retries."""

from surroundings import clean_surroundings  # noqa: F401 (a fixture)
