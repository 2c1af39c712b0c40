"""No file of the repository names a package index or a path of the machine it was written on."""

import re
from pathlib import Path

# Put together from pieces, so that this file holds none of what it looks for.
INDEX_HOSTS = [
    "pypi" + ".org",
    "python" + "hosted.org",
    "download.py" + "torch.org",
    "pypi.nvidia" + ".com",
    "registry.npm" + "js.org",
    "conda.ana" + "conda.org",
]
INDEX_SETTING = "(index-url|extra-index|default-index|find-links|registry)" + r"[^a-z\n]{1,6}https?://"
HOME_FOLDER = r"(?<![\w.~-])/(home|Users)/" + r"[\w.-]+/"
FIXED_FOLDERS = r"(?<![\w.~-])/(root|work)" + "/"


def lines_that_match(files, pattern):
    compiled = re.compile(pattern.encode(), re.IGNORECASE)
    return [f"{name}: {match[0].decode()}" for name, content in files.items() if (match := compiled.search(content))]


def test_no_tracked_file_names_a_package_index(repository_files):
    hosts = "|".join(re.escape(host) for host in INDEX_HOSTS)
    assert lines_that_match(repository_files, hosts) == []
    assert lines_that_match(repository_files, INDEX_SETTING) == []


def test_no_tracked_file_names_a_path_of_a_machine(repository_files, root):
    here = {f"{root}/", f"{Path.home()}/"} - {"//"}
    pattern = "|".join([*(re.escape(folder) for folder in here), FIXED_FOLDERS, HOME_FOLDER])
    assert lines_that_match(repository_files, pattern) == []


def test_no_tracked_file_is_larger_than_8_mib(repository_files):
    assert [name for name, content in repository_files.items() if len(content) > 8 * 2**20] == []
