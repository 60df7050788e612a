"""Our own little worlds for word problems: sentences with holes, no numbers."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Ada", "Ben", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas",
    "Kofi", "Lena", "Mira", "Nils", "Oona", "Pablo", "Quinn", "Rosa", "Samir", "Tove",
)  # fmt: skip

SCENES = (
    "It is Saturday morning.",
    "The sun is out and the week is over.",
    "It has been raining since breakfast.",
    "{name} is up early today.",
    "School starts again after the holidays.",
    "{name} likes to keep count of things.",
    "The evening is quiet and nobody else is at home.",
)


@dataclass(frozen=True)
class Story:
    """Sentences about one quantity, with the holes ``{name}``, ``{x}`` and, in ``groups``, ``{y}``.

    ``start`` states the quantity, ``groups`` states it as a product, ``more`` and ``less`` change
    it, ``share`` splits it equally. The question is ``total`` after additions, ``left`` after
    subtractions, ``now`` after both and ``each`` after a split.
    """

    key: str
    start: str
    groups: str
    more: tuple[str, str]
    less: tuple[str, str]
    total: str
    left: str
    now: str
    share: str
    each: str


STORIES = (
    Story(
        "marbles",
        start="{name} has {x} marbles.",
        groups="{name} has {x} bags with {y} marbles in each bag.",
        more=("{name} finds {x} more marbles.", "{name} gets {x} more marbles from a friend."),
        less=("{name} loses {x} marbles.", "{name} gives away {x} marbles."),
        total="How many marbles does {name} have in total?",
        left="How many marbles does {name} have left?",
        now="How many marbles does {name} have now?",
        share="{name} puts all the marbles into {x} jars, the same number in each.",
        each="How many marbles are in each jar?",
    ),
    Story(
        "eggs",
        start="{name} collects {x} eggs.",
        groups="{name} has {x} hens, and each hen lays {y} eggs.",
        more=("{name} collects {x} more eggs.", "{name} gets {x} more eggs from a neighbour."),
        less=("{name} uses {x} eggs for a cake.", "{name} breaks {x} eggs."),
        total="How many eggs does {name} have in total?",
        left="How many eggs does {name} have left?",
        now="How many eggs does {name} have now?",
        share="{name} packs the eggs into {x} boxes, the same number in each.",
        each="How many eggs are in each box?",
    ),
    Story(
        "bus",
        start="There are {x} people on {name}'s bus.",
        groups="{name}'s bus has {x} rows with {y} people in each row.",
        more=(
            "Then {x} more people get on the bus.",
            "At the market {x} more people get on the bus.",
        ),
        less=("Then {x} people get off the bus.", "At the bridge {x} people get off the bus."),
        total="How many people are on the bus in total?",
        left="How many people are left on the bus?",
        now="How many people are on the bus now?",
        share="At the end the people change to {x} vans, the same number in each.",
        each="How many people are in each van?",
    ),
    Story(
        "money",
        start="{name} has {x} dollars.",
        groups="{name} works for {x} hours and earns {y} dollars in each hour.",
        more=("{name} earns {x} more dollars.", "{name} gets {x} more dollars as a gift."),
        less=("{name} spends {x} dollars on lunch.", "{name} pays {x} dollars for a ticket."),
        total="How many dollars does {name} have in total?",
        left="How many dollars does {name} have left?",
        now="How many dollars does {name} have now?",
        share="{name} splits the money equally among {x} children.",
        each="How many dollars does each child get?",
    ),
    Story(
        "books",
        start="{name} has {x} books.",
        groups="{name} has {x} shelves with {y} books on each shelf.",
        more=("{name} buys {x} more books.", "{name} gets {x} more books from a cousin."),
        less=("{name} gives {x} books to the school.", "{name} sells {x} books."),
        total="How many books does {name} have in total?",
        left="How many books does {name} have left?",
        now="How many books does {name} have now?",
        share="{name} packs the books into {x} crates, the same number in each.",
        each="How many books are in each crate?",
    ),
    Story(
        "tomatoes",
        start="{name} picks {x} tomatoes.",
        groups="{name} has {x} plants with {y} tomatoes on each plant.",
        more=("{name} picks {x} more tomatoes.", "{name} buys {x} more tomatoes."),
        less=("{name} eats {x} tomatoes.", "{name} cuts up {x} tomatoes for a salad."),
        total="How many tomatoes does {name} have in total?",
        left="How many tomatoes does {name} have left?",
        now="How many tomatoes does {name} have now?",
        share="{name} divides the tomatoes equally among {x} baskets.",
        each="How many tomatoes are in each basket?",
    ),
    Story(
        "stickers",
        start="{name} has {x} stickers.",
        groups="{name} buys {x} sheets with {y} stickers on each sheet.",
        more=("{name} buys {x} more stickers.", "{name} wins {x} more stickers."),
        less=("{name} uses {x} stickers.", "{name} throws away {x} stickers."),
        total="How many stickers does {name} have in total?",
        left="How many stickers does {name} have left?",
        now="How many stickers does {name} have now?",
        share="{name} shares the stickers equally among {x} classmates.",
        each="How many stickers does each classmate get?",
    ),
    Story(
        "rolls",
        start="{name} bakes {x} rolls.",
        groups="{name} bakes {x} trays with {y} rolls on each tray.",
        more=("{name} bakes {x} more rolls.", "{name} takes {x} more rolls out of the freezer."),
        less=("{name} sells {x} rolls.", "{name} burns {x} rolls."),
        total="How many rolls does {name} have in total?",
        left="How many rolls does {name} have left?",
        now="How many rolls does {name} have now?",
        share="{name} fills {x} bags with the rolls, the same number in each.",
        each="How many rolls are in each bag?",
    ),
    Story(
        "fish",
        start="{name} has {x} fish in a pond.",
        groups="{name} has {x} tanks with {y} fish in each tank.",
        more=("{name} buys {x} more fish.", "{name} catches {x} more fish."),
        less=("{name} sells {x} fish.", "A heron eats {x} fish."),
        total="How many fish does {name} have in total?",
        left="How many fish does {name} have left?",
        now="How many fish does {name} have now?",
        share="{name} moves the fish into {x} bowls, the same number in each.",
        each="How many fish are in each bowl?",
    ),
    Story(
        "hike",
        start="{name} plans to walk {x} miles.",
        groups="{name} plans to walk {x} trails of {y} miles each.",
        more=("{name} adds {x} more miles.", "{name} decides to walk {x} more miles."),
        less=("{name} walks {x} miles of the way.", "{name} takes the bus for {x} miles."),
        total="How many miles will {name} walk in total?",
        left="How many miles does {name} have left?",
        now="How many miles does {name} have to walk now?",
        share="{name} walks the same number of miles on each of {x} days.",
        each="How many miles does {name} walk on each day?",
    ),
    Story(
        "cars",
        start="There are {x} cars in {name}'s parking lot.",
        groups="{name}'s parking lot has {x} rows with {y} cars in each row.",
        more=("Then {x} more cars arrive.", "After lunch {x} more cars drive in."),
        less=("Then {x} cars leave.", "Before dinner {x} cars drive away."),
        total="How many cars are in the parking lot in total?",
        left="How many cars are left in the parking lot?",
        now="How many cars are in the parking lot now?",
        share="The cars move to {x} garages, the same number in each.",
        each="How many cars are in each garage?",
    ),
    Story(
        "beads",
        start="{name} has {x} beads on a string.",
        groups="{name} makes {x} bracelets with {y} beads in each bracelet.",
        more=("{name} adds {x} red beads.", "{name} threads {x} more beads."),
        less=("{name} takes off {x} beads.", "{name} loses {x} beads."),
        total="How many beads does {name} have in total?",
        left="How many beads does {name} have left?",
        now="How many beads does {name} have now?",
        share="{name} makes {x} equal necklaces from the beads.",
        each="How many beads are in each necklace?",
    ),
    Story(
        "photos",
        start="{name} takes {x} photos at the zoo.",
        groups="{name} visits {x} towns and takes {y} photos in each town.",
        more=("{name} takes {x} more photos.", "{name} gets {x} more photos from a friend."),
        less=("{name} deletes {x} photos.", "{name} removes {x} photos that are too dark."),
        total="How many photos does {name} have in total?",
        left="How many photos does {name} have left?",
        now="How many photos does {name} have now?",
        share="{name} sorts the photos into {x} albums, the same number in each.",
        each="How many photos are in each album?",
    ),
    Story(
        "water",
        start="{name} has {x} liters of water.",
        groups="{name} carries {x} buckets with {y} liters of water in each bucket.",
        more=("{name} adds {x} liters of water.", "{name} fetches {x} more liters of water."),
        less=(
            "{name} drinks {x} liters of water.",
            "{name} uses {x} liters of water for the flowers.",
        ),
        total="How many liters of water does {name} have in total?",
        left="How many liters of water does {name} have left?",
        now="How many liters of water does {name} have now?",
        share="{name} pours the water into {x} equal barrels.",
        each="How many liters of water are in each barrel?",
    ),
    Story(
        "choir",
        start="There are {x} singers in {name}'s choir.",
        groups="{name}'s choir has {x} rows with {y} singers in each row.",
        more=("In spring {x} more singers join.", "After a concert {x} more singers join."),
        less=("In autumn {x} singers leave.", "After a quarrel {x} singers leave."),
        total="How many singers does the choir have in total?",
        left="How many singers does the choir have left?",
        now="How many singers does the choir have now?",
        share="The singers form {x} equal groups.",
        each="How many singers are in each group?",
    ),
    Story(
        "cards",
        start="{name} has {x} cards.",
        groups="{name} has {x} decks with {y} cards in each deck.",
        more=("{name} draws {x} more cards.", "{name} wins {x} more cards."),
        less=("{name} plays {x} cards.", "{name} loses {x} cards."),
        total="How many cards does {name} have in total?",
        left="How many cards does {name} have left?",
        now="How many cards does {name} have now?",
        share="{name} deals all the cards to {x} players, the same number to each.",
        each="How many cards does each player get?",
    ),
)
