"""Print what a plugin registers with one quick check of the harness, as KIND:NAME CHECK, one a line.

``nanotrain plugins --json | a_check_of_each.py PLUGIN``. The check is one that trains where there is one.
"""

import json
import sys

CHECKS = {
    "data": "every_process_has_the_same_epochs",
    "model": "flops_are_those_of_a_pass",
    "monitor": "publishing_waits_for_nothing",
    "optimizer": "masters_are_updated_in_parts",
    "parallel": "w1-mixed_dtypes",
    "schedule": "stages_exist_whatever_they_cost",
}

for plugin in json.load(sys.stdin)["plugins"]:
    if plugin["name"] == sys.argv[1]:
        for each in plugin["components"]:
            print(f"{each['kind']}:{each['name']}", CHECKS[each["kind"]])
