# SPDX-License-Identifier: Apache-2.0

"""Plans: which servers move where, so that there is room for what is wanted.

Pure reckoning on what it is given; nothing is read, and nothing is written.

A plan says on which hosts what is wanted is going to be, and of each server
that is in the way there to which other host it moves. Every server moves once
at most, and every target has its room from the beginning: no move waits for
another one, so that they may be made in any order, and one that fails spoils
none of the others.

The plan with the fewest moves is looked for, and of these the one by which the
least memory is moved. What that costs on each host is known first; which hosts
are taken is then found from the best choice on (``choices``), until the
servers of one find targets. Where there is little to choose from many choices
are tried; else servers that find no target are left where they are, and the
rest is looked for anew.
"""

from blazar_core.books.planning.search import plan
from blazar_core.books.planning.words import is_complete
from blazar_core.books.planning.words import Movable
from blazar_core.books.planning.words import Move
from blazar_core.books.planning.words import Place
from blazar_core.books.planning.words import Plan
from blazar_core.books.planning.words import Wish

__all__ = ['Movable', 'Move', 'Place', 'Plan', 'Wish', 'is_complete', 'plan']
