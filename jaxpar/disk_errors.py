"""Why something could not be written, in the operating system's words."""

import os
import re
from collections.abc import Iterator
from errno import EACCES, EDQUOT, EFBIG, EIO, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS, ESTALE

# What a user or administrator can put right: disk full, file too large, over quota, read-only, forbidden, gone, broken.
DISK_ERRORS = {EACCES, EDQUOT, EFBIG, EIO, ENOENT, ENOSPC, ENOTDIR, EPERM, EROFS, ESTALE}


def disk_reason(error: BaseException) -> str | None:
    """The operating system's reason, if that is what stopped the write. TensorStore puts its number into the text."""
    for link in _chain(error):
        number = link.errno if isinstance(link, OSError) else None
        if number is None and (match := re.search(r"os_error_code='(\d+)'", str(link))):
            number = int(match.group(1))
        if number in DISK_ERRORS:
            return os.strerror(number).lower()
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
