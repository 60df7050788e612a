"""Our own little worlds for word problems: sentences with holes, no numbers."""

from __future__ import annotations

from dataclasses import dataclass

NAMES = (
    "Ada", "Ben", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kofi", "Lena",
    "Mira", "Nils", "Oona", "Pablo", "Quinn", "Rosa", "Samir", "Tove",
)  # fmt: skip

SCENES = (
    "",
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
    """Sentences about one quantity. Holes: ``{name}``, ``{x}`` and, in ``groups``, ``{y}`` for each group.

    ``start`` states the quantity, ``groups`` states it as a product, ``more`` and ``less`` change it, and
    ``share`` splits it equally; ``ask`` and ``ask_share`` are the questions after those.
    """

    key: str
    start: str
    groups: str
    more: tuple[str, str]
    less: tuple[str, str]
    ask: str
    share: str
    ask_share: str


STORIES = (
    Story(
        "marbles",
        "{name} has {x} marbles.",
        "{name} has {x} bags with {y} marbles in each bag.",
        ("{name} finds {x} more marbles.", "A friend gives {name} {x} more marbles."),
        ("{name} loses {x} marbles.", "{name} gives {x} marbles to a friend."),
        "How many marbles does {name} have now?",
        "{name} puts all the marbles into {x} jars, the same number in each.",
        "How many marbles are in each jar?",
    ),
    Story(
        "eggs",
        "{name} collects {x} eggs from the hens.",
        "{name} keeps {x} hens, and each hen lays {y} eggs.",
        ("A neighbour brings {name} {x} more eggs.", "{name} finds {x} more eggs in the straw."),
        ("{name} uses {x} eggs for a cake.", "{x} eggs break on the way to the kitchen."),
        "How many eggs does {name} have now?",
        "{name} packs the eggs into {x} boxes, the same number in each.",
        "How many eggs are in each box?",
    ),
    Story(
        "bus",
        "A bus leaves the station with {x} passengers.",
        "A bus has {x} full rows with {y} passengers in each row.",
        ("At the next stop {x} more passengers get on.", "At the market {x} more passengers get on."),
        ("At the library {x} passengers get off.", "At the bridge {x} passengers get off."),
        "How many passengers are on the bus now?",
        "At the end the passengers change to {x} vans, the same number in each.",
        "How many passengers are in each van?",
    ),
    Story(
        "coins",
        "{name} has {x} dollars in a money box.",
        "{name} works for {x} hours and earns {y} dollars an hour.",
        ("{name} gets {x} dollars as a gift.", "{name} earns {x} more dollars by washing a car."),
        ("{name} pays {x} dollars for lunch.", "{name} spends {x} dollars on a bus ticket."),
        "How many dollars does {name} have now?",
        "{name} splits the money equally among {x} children.",
        "How many dollars does each child get?",
    ),
    Story(
        "books",
        "There are {x} books on the shelf in {name}'s room.",
        "{name}'s bookcase has {x} shelves with {y} books on each shelf.",
        ("{name} buys {x} more books.", "{name} brings home {x} more books from a fair."),
        ("{name} lends {x} books to a cousin.", "{name} gives {x} books to the school."),
        "How many books does {name} have now?",
        "{name} packs the books into {x} crates, the same number in each.",
        "How many books are in each crate?",
    ),
    Story(
        "garden",
        "{name} picks {x} tomatoes in the garden.",
        "{name} has {x} tomato plants, and each plant carries {y} tomatoes.",
        ("{name} picks {x} more tomatoes from a pot.", "The neighbour gives {name} {x} more tomatoes."),
        ("The birds eat {x} of the tomatoes.", "{name} cuts up {x} tomatoes for a salad."),
        "How many tomatoes are left for {name}?",
        "{name} divides the tomatoes equally among {x} baskets.",
        "How many tomatoes are in each basket?",
    ),
    Story(
        "stickers",
        "{name} has {x} stickers.",
        "{name} buys {x} sheets with {y} stickers on each sheet.",
        ("{name} swaps a card for {x} more stickers.", "{name} wins {x} more stickers."),
        ("{name} sticks {x} stickers on a suitcase.", "{name} throws away {x} torn stickers."),
        "How many stickers does {name} have now?",
        "{name} shares the stickers equally among {x} classmates.",
        "How many stickers does each classmate get?",
    ),
    Story(
        "bakery",
        "{name} bakes {x} rolls.",
        "{name} bakes {x} trays with {y} rolls on each tray.",
        ("{name} bakes {x} more rolls.", "{name} takes {x} more rolls out of the freezer."),
        ("{name} sells {x} rolls.", "{name} burns {x} rolls and throws them away."),
        "How many rolls does {name} have now?",
        "{name} fills {x} bags with the rolls, the same number in each.",
        "How many rolls are in each bag?",
    ),
    Story(
        "fish",
        "There are {x} fish in {name}'s pond.",
        "{name} has {x} tanks with {y} fish in each tank.",
        ("{name} buys {x} more fish.", "{x} young fish hatch."),
        ("A heron eats {x} fish.", "{name} sells {x} fish to a friend."),
        "How many fish does {name} have now?",
        "{name} moves the fish into {x} bowls, the same number in each.",
        "How many fish are in each bowl?",
    ),
    Story(
        "steps",
        "{name} walks {x} kilometers on the first day of a hike.",
        "{name} walks {y} kilometers a day for {x} days.",
        ("{name} then walks {x} more kilometers.", "{name} adds a detour of {x} kilometers."),
        ("The guide says that {x} of these kilometers do not count.", "{name} did {x} of these kilometers by bus."),
        "How many kilometers did {name} walk?",
        "{name} wants to walk the same distance in {x} equal parts.",
        "How many kilometers long is each part?",
    ),
    Story(
        "parking",
        "There are {x} cars in the parking lot.",
        "The parking lot has {x} full rows with {y} cars in each row.",
        ("Then {x} more cars arrive.", "After the film {x} more cars drive in."),
        ("Then {x} cars leave.", "Before dinner {x} cars drive away."),
        "How many cars are in the parking lot now?",
        "The cars move to {x} garages, the same number in each.",
        "How many cars are in each garage?",
    ),
    Story(
        "beads",
        "{name} has a string of {x} beads.",
        "{name} makes {x} bracelets with {y} beads in each bracelet.",
        ("{name} adds {x} red beads.", "{name} threads {x} more beads."),
        ("{name} takes off {x} beads.", "The string snaps and {x} beads are lost."),
        "How many beads does {name} use in the end?",
        "{name} makes {x} equal necklaces from the beads.",
        "How many beads are in each necklace?",
    ),
    Story(
        "photos",
        "{name} takes {x} photos at the zoo.",
        "{name} visits {x} towns and takes {y} photos in each town.",
        ("{name} takes {x} more photos at home.", "A friend sends {name} {x} more photos."),
        ("{name} deletes {x} blurred photos.", "{name} removes {x} photos that look the same."),
        "How many photos does {name} have now?",
        "{name} sorts the photos into {x} albums, the same number in each.",
        "How many photos are in each album?",
    ),
    Story(
        "water",
        "A tank holds {x} liters of water.",
        "{name} pours {x} buckets of {y} liters each into a tank.",
        ("{name} adds {x} liters of water.", "The rain adds {x} liters of water."),
        ("{name} takes out {x} liters for the flowers.", "The tank leaks {x} liters in the night."),
        "How many liters of water are in the tank now?",
        "{name} fills the water into {x} equal barrels.",
        "How many liters of water are in each barrel?",
    ),
    Story(
        "choir",
        "A choir has {x} singers.",
        "A choir stands in {x} rows with {y} singers in each row.",
        ("In spring {x} new singers join.", "{name} and others join, which makes {x} new singers."),
        ("In autumn {x} singers leave.", "After the concert {x} singers stop."),
        "How many singers does the choir have now?",
        "For practice the singers form {x} equal groups.",
        "How many singers are in each group?",
    ),
    Story(
        "cards",
        "{name} holds {x} cards.",
        "{name} has {x} decks with {y} cards in each deck.",
        ("{name} draws {x} more cards.", "{name} wins {x} cards from a friend."),
        ("{name} plays {x} cards.", "{name} loses {x} cards in a game."),
        "How many cards does {name} have now?",
        "{name} deals all the cards to {x} players, the same number to each.",
        "How many cards does each player get?",
    ),
)
