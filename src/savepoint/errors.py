"""The two ways in which work ends early that are nobody's bug: bad input, and a person who stops a run."""


class UserError(Exception):
    """Bad usage or input. `str()` is one line that names the file, the line or the key; commands print it and exit with status 2."""


class Interrupted(Exception):
    """A person stopped a run with Ctrl-C. `str()` says what was saved and how to go on; commands exit with status 130."""
