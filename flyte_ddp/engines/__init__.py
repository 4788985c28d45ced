"""Launchers that run ranks on other engines: torch Elastic, Ray and Dask."""
