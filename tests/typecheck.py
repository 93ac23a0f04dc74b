"""Checks annotations as PEP 484 reads them: an int is a float."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
