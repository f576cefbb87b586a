"""Erasure-coded fragments of a state: any m of m + k give it again.

A state is cut into stripes (:mod:`~anabranch.fragments.layout`), and each stripe is coded into
n = m + k rows (:mod:`~anabranch.fragments.code`). A fragment is its row of each stripe, and a label
with checksums (:mod:`~anabranch.fragments.label`). ``encode`` and ``recompute`` do it in memory,
``Encoder`` and ``Reader`` for states of any length. What m and k should be says
:mod:`~anabranch.fragments.adapt`, by the models of :mod:`~anabranch.fragments.models`, and
which nodes hold them :mod:`~anabranch.fragments.spread`.

There is no network here, and no thread.
"""

from anabranch.fragments.adapt import Adapt as Adapt
from anabranch.fragments.adapt import Choice as Choice
from anabranch.fragments.adapt import Measured as Measured
from anabranch.fragments.adapt import Prefer as Prefer
from anabranch.fragments.adapt import choose as choose
from anabranch.fragments.code import check_shape as check_shape
from anabranch.fragments.decoder import Decoder as Decoder
from anabranch.fragments.decoder import Gathering as Gathering
from anabranch.fragments.decoder import turn as turn
from anabranch.fragments.encoder import Encoder as Encoder
from anabranch.fragments.fragment import Fragment as Fragment
from anabranch.fragments.fragment import encode as encode
from anabranch.fragments.fragment import recompute as recompute
from anabranch.fragments.label import Label as Label
from anabranch.fragments.label import StateId as StateId
from anabranch.fragments.layout import Layout as Layout
from anabranch.fragments.reading import Reader as Reader
from anabranch.fragments.reading import Source as Source
from anabranch.fragments.remaking import Remaking as Remaking
from anabranch.fragments.spread import Holder as Holder
from anabranch.fragments.spread import spread as spread
