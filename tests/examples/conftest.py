"""Launchers for the examples."""

from launchers import dask_client, launch, no_current_client, ray_address  # noqa: F401 (fixtures)
